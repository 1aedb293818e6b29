"""Plots and the one-file HTML page, from results alone."""


def write_report(run):
    return run


def print_summary(results):
    pass

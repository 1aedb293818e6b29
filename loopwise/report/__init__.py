"""Plots, the one-file HTML page and the terminal summary, from what a run folder holds."""

from loopwise.report.page import write_report
from loopwise.report.stability import print_stability, write_stability_report
from loopwise.report.terminal import print_frontiers, print_summary, summary_table

__all__ = [
    "print_frontiers",
    "print_stability",
    "print_summary",
    "summary_table",
    "write_report",
    "write_stability_report",
]

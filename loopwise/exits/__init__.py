"""Exit policies. A new one costs its file and one line here."""

from loopwise.errors import ExitError
from loopwise.registry import Registry

EXITS = Registry(
    "exit rule",
    {
        "fixed": "loopwise.exits.fixed:FixedDepth",
        "kl": "loopwise.exits.kl:StepKL",
        "min-p-kl": "loopwise.exits.min_p_kl:MinPKL",
        "entropy": "loopwise.exits.entropy:EntropyChange",
        "argmax": "loopwise.exits.argmax:ArgmaxChange",
        "margin": "loopwise.exits.margin:Margin",
        "latent-change": "loopwise.exits.latent_change:LatentChange",
        "cosine": "loopwise.exits.cosine:CosineChange",
        "second-difference": "loopwise.exits.second_difference:SecondDifference",
        "latent-kl": "loopwise.exits.latent_kl:LatentKL",
        "short-list-kl": "loopwise.exits.short_list_kl:ShortListKL",
        "sketched-kl": "loopwise.exits.sketched_kl:SketchedKL",
        "certified": "loopwise.exits.certified:Certified",
        "gate": "loopwise.exits.gate:Gate",
        "probe": "loopwise.exits.probe:Probe",
        "oracle": "loopwise.exits.oracle:Oracle",
    },
    ExitError,
)


def needs_fitting(name: str) -> bool:
    """Whether the rule has a state that is fitted to text and stored with the checkpoint.

    Raises:
        ExitError: an unknown name.
    """
    return bool(EXITS[name].needs_fitting)

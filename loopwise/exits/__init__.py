"""Exit policies. A new one costs its file and one line here."""

from loopwise.errors import ExitError
from loopwise.registry import Registry

EXITS = Registry(
    "exit rule",
    {
        "fixed": "loopwise.exits.fixed:FixedDepth",
        "kl": "loopwise.exits.kl:StepKL",
        "latent-change": "loopwise.exits.latent_change:LatentChange",
        "probe": "loopwise.exits.probe:Probe",
        "oracle": "loopwise.exits.oracle:Oracle",
    },
    ExitError,
)

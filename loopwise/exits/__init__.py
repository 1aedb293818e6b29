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
        "probe": "loopwise.exits.probe:Probe",
        "oracle": "loopwise.exits.oracle:Oracle",
    },
    ExitError,
)

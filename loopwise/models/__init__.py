"""Architectures. A new one costs its file and one line here."""

from loopwise.errors import ConfigError
from loopwise.registry import Registry

MODELS = Registry(
    "architecture",
    {
        "recurrent": "loopwise.models.recurrent:RecurrentModel",
        "looped": "loopwise.models.looped:LoopedModel",
        "fixed": "loopwise.models.fixed:FixedModel",
        "raven": "loopwise.models.raven:RavenModel",
        "ouro": "loopwise.models.ouro:OuroModel",
        "nanochat": "loopwise.models.nanochat:NanochatModel",
        "loopformer": "loopwise.models.loopformer:LoopFormerModel",
        "dory": "loopwise.models.dory:DoryModel",
        "parcae": "loopwise.models.parcae:ParcaeModel",
    },
    ConfigError,
)

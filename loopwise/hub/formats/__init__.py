"""Published checkpoint formats. A new one costs its file and one line here."""

from loopwise.errors import ConfigError
from loopwise.registry import Registry

FORMATS = Registry(
    "checkpoint format",
    {
        "huginn": "loopwise.hub.formats.huginn:Huginn",
        "retrofit": "loopwise.hub.formats.retrofit:Retrofit",
        "ouro": "loopwise.hub.formats.ouro:Ouro",
        "nanbeige": "loopwise.hub.formats.nanbeige:Nanbeige",
        "nanochat": "loopwise.hub.formats.nanochat:Nanochat",
        "flt": "loopwise.hub.formats.flt:FLT",
        "loopformer": "loopwise.hub.formats.loopformer:LoopFormer",
        "dory": "loopwise.hub.formats.dory:Dory",
        "parcae": "loopwise.hub.formats.parcae:Parcae",
        "llama": "loopwise.hub.formats.llama:Llama",
    },
    ConfigError,
)

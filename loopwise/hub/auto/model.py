"""A looped model as transformers knows models: called, generated with, trained."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from loopwise.errors import ConfigError
from loopwise.exits.rule import ExitRule
from loopwise.hub.auto.cache import CACHE, check_cache, one_cache
from loopwise.hub.auto.config import LoopwiseConfig
from loopwise.hub.auto.folder import Beside
from loopwise.hub.auto.inputs import read_inputs
from loopwise.hub.auto.passes import Passed, exit_pass, uniform_pass
from loopwise.hub.auto.plan import LayerIndex, Plan, asked_by, make_plan
from loopwise.hub.auto.stored import StoredModel, with_prefix
from loopwise.hub.auto.versions import check_version
from loopwise.hub.auto.view import BatchView, FrozenView
from loopwise.measure.evaluate import check_length
from loopwise.models import MODELS
from loopwise.models.base import LoopedLM

check_version(transformers.__version__)
_OTHER_TOKENS = (
    "assistant_model has tokens that the model does not have: to sample with it, transformers "
    "would cut its head to those of both, which loopwise models do not allow; use do_sample=False, "
    "or an assistant of the model's own tokenizer"
)
_ASSISTANCE = ("assistant_model", "tokenizer", "assistant_tokenizer")


@dataclass
class LoopwiseOutput(CausalLMOutputWithPast):
    """What transformers' causal models return, with the depth of each token.

    Attributes:
        exit_depths: recurrences each token of the call ran, ``(batch, seq)`` int64; 0 for padding.
        hidden_states: where asked for, the latent before the loop and after each recurrence.
    """

    exit_depths: Tensor | None = None


class Recurrence(GradientCheckpointingLayer):
    """One core step, as the unit that gradient checkpointing recomputes; it has no weights."""

    def forward(
        self, latent: Tensor, injection: Tensor, r: int, view: BatchView, model: LoopedLM
    ) -> Tensor:
        return model.core_step(latent, injection, r, view)


class LoopwiseForCausalLM(StoredModel, GenerationMixin):
    """Any architecture of MODELS behind the interfaces of transformers.

    ``num_loops`` and ``exit`` are arguments of a call and of `generate`; nothing remembers them.
    ``attn_implementation`` changes nothing: attention is PyTorch's fused one whatever it says.

    Attributes:
        model: the :class:`loopwise.models.base.LoopedLM`.
        beside: what lay beside its weights; :mod:`loopwise.hub.auto.stored` reads and writes it.
    """

    config_class = LoopwiseConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `Trainer` may pass num_items_in_batch
    _supports_sdpa = True
    _skip_keys_device_placement = ("past_key_values", "cache")

    def __init__(self, config: LoopwiseConfig) -> None:
        super().__init__(config)
        self.model = MODELS[config.architecture](config.settings)
        self.recurrence = Recurrence()
        self.beside = Beside()
        self.default_plan: Plan | None = None  # of the copy that `generate` works on
        self.register_load_state_dict_pre_hook(with_prefix)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the architecture has initialised itself."""

    def get_input_embeddings(self) -> nn.Module:
        return dict(self.model.named_children())["embedding"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head's own matrix; None where it reads the embedding's."""
        return dict(self.model.named_children()).get("unembedding")

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Another matrix for the head.

        Raises:
            ConfigError: it has none, as a head that transformers has cut to some of the tokens.
        """
        if not hasattr(new_embeddings, "weight"):
            raise ConfigError(_OTHER_TOKENS)
        self.model.unembedding = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """As transformers does; the config and shape of the model follow."""
        resized = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.config.vocab_size = resized.weight.shape[0]
        self.model.config = self.config.settings
        self.model.geometry = self.config.geometry
        return resized

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        exit: str | ExitRule | Plan | None = None,
        *,
        cache: Any = None,
        inputs_embeds: None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache_position: Tensor | None = None,
    ) -> LoopwiseOutput | tuple[Any, ...]:
        """Logits, loss, cache and depths of one call.

        Args:
            input_ids: ``(batch, seq)`` int64.
            attention_mask: ``(batch, cached + seq)`` int, bool or float; 1 for text, 0 for padding
                on either side.
            position_ids: ``(batch, seq)`` int; by default counted along the mask.
            past_key_values, cache: one and the same, under its older and its newer name.
            labels: ``(batch, seq)`` int64, -100 where nothing is learned; shifted here, so that
                labels are the input ids themselves.
            use_cache: whether to return a cache; by default the config's, and never while gradients
                are recorded in training.
            logits_to_keep: how many last tokens' logits to compute, or their indices; 0 for all.
            num_loops: recurrences of every token; by default the config's.
            exit: an exit rule (``"latent-change:0.1"``) or calibrated tier (``"balanced"``) that
                stops each token at its own depth; outside training only.
            num_items_in_batch: what the summed loss is divided by; by default its own tokens.
            inputs_embeds, output_attentions: refused; other versions of transformers name them.
            cache_position: of early versions; the cache itself says the same.
        Raises:
            ConfigError: ``num_loops`` with ``exit``, ``exit`` in training, or attention weights.
            DepthError, ExitError: a depth or a rule that cannot be run.
            ShapeError: a mask or positions that do not fit.
        """
        learning = self.training and torch.is_grad_enabled()
        plan = self._plan(num_loops, exit)
        if learning and not plan.uniform:
            raise ConfigError(
                f"exit={str(plan.rule)!r} decides without gradients and cannot be trained through; "
                "train with num_loops=, or call model.eval()"
            )
        if inputs_embeds is not None:
            raise ConfigError("inputs_embeds: the embedding is part of the prelude; give input_ids")
        if output_attentions or self.config.output_attentions:
            raise ConfigError("output_attentions: attention runs fused, its weights are not kept")
        cache = one_cache(past_key_values, cache)
        layers = LayerIndex(self.model.geometry, plan.rule.max_depth, plan.coda_entries)
        if cache is not None and learning:
            raise ConfigError("a KV cache cannot be written while training; leave it out")
        wanted = self.config.use_cache if use_cache is None else use_cache
        if cache is None and wanted and not learning:
            cache = DynamicCache()
        seen = check_cache(cache, layers)
        inputs = read_inputs(input_ids, attention_mask, position_ids, seen)
        if self.model.geometry.max_positions is not None:
            check_length(self.model, int(inputs.positions.max()) + 1)
        keep_latents = output_hidden_states or self.config.output_hidden_states
        passed = self._pass(
            input_ids,
            plan,
            (BatchView if plan.uniform else FrozenView)(
                layers, inputs, cache, self.model.dtype, input_ids
            ),
            slice(-logits_to_keep if logits_to_keep else None, None)
            if isinstance(logits_to_keep, int)
            else logits_to_keep,
            bool(keep_latents),
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=passed.logits,
                labels=labels,
                vocab_size=self.model.geometry.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        output = LoopwiseOutput(
            loss=loss,
            logits=passed.logits,
            hidden_states=passed.latents,
            exit_depths=passed.exit_depths,
            **{CACHE: cache},
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _pass(
        self,
        input_ids: Tensor,
        plan: Plan,
        view: BatchView,
        kept: slice | Tensor,
        keep_latents: bool,
    ) -> Passed:
        if isinstance(view, FrozenView):
            if keep_latents:
                raise ConfigError(
                    "output_hidden_states needs a uniform depth; give num_loops= instead of exit="
                )
            return exit_pass(self.model, input_ids, view, plan, kept)

        def core_step(latent: Tensor, injection: Tensor, r: int, view: BatchView) -> Tensor:
            return self.recurrence(latent, injection, r, view, self.model)

        return uniform_pass(
            self.model,
            input_ids,
            view,
            plan.rule.max_depth,
            kept,
            core_step=core_step,
            keep_latents=keep_latents,
        )

    def _plan(self, num_loops: int | None, exit: str | ExitRule | Plan | None) -> Plan:
        """See :func:`loopwise.hub.auto.plan.make_plan`."""
        if num_loops is None and exit is None and self.default_plan is not None:
            return self.default_plan
        return make_plan(
            self.model,
            num_loops,
            exit,
            self.config.usual_loops,
            lambda text, depth: self.beside.rule(self.model, text, depth),
        )

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        num_loops: int | None = None,
        exit: str | ExitRule | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers generates, at a depth or under an exit rule.

        Its own caches are made for that depth. An assistant model keeps its own depth.

        Args:
            num_loops, exit: as for a call, at most one of them; a ``GenerationConfig`` may say
                them too.
        Raises:
            ConfigError: ``assistant_early_exit``, which is for models of layers that run once; or
                an assistant of ours with other tokens, to sample with.
        """
        given = args[0] if args else kwargs.get("generation_config")
        if kwargs.get("assistant_early_exit") is not None:
            raise ConfigError(
                "assistant_early_exit counts layers; to draft with fewer recurrences load the same "
                "folder again with num_loops=2 and give it as assistant_model="
            )
        said = [getattr(config, "do_sample", None) for config in (given, self.generation_config)]
        if next((s for s in (kwargs.get("do_sample"), *said) if s is not None), False):
            _check_assistant(*map(kwargs.get, _ASSISTANCE))
        plan = self._plan(*asked_by(num_loops, exit, (given, self.generation_config)))
        other = copy.copy(self)  # the same modules and weights; depth and caches of this call alone
        other.config = self.config.at(plan.rule.max_depth, plan.coda_entries)
        other.default_plan = plan
        return super(LoopwiseForCausalLM, other).generate(inputs, *args, **kwargs)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # its signature is looked at
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does, without what stop strings need and a call does not."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("tokenizer", None)
        inputs.pop("assistant_tokenizer", None)
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: each call turns it into what its cache needs."""
        return attention_mask


def _check_assistant(assistant: Any, tokenizer: Any, its_tokenizer: Any) -> None:
    """Refuse what would make transformers cut the head and the embedding of a model of ours.

    It does so where it samples with an assistant that has tokens the model does not have.
    """
    if not isinstance(assistant, LoopwiseForCausalLM) or tokenizer is None or its_tokenizer is None:
        return
    if its_tokenizer.get_vocab().keys() - tokenizer.get_vocab().keys():
        raise ConfigError(_OTHER_TOKENS)


AutoModelForCausalLM.register(LoopwiseConfig, LoopwiseForCausalLM, exist_ok=True)

"""One training run, as a YAML file says it. Every section is a dataclass; a key that is none of its fields is an
error. Keys that Megatron has too keep Megatron's names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml

from ..config import ConfigError, Mamba3Config
from ..layers.sizes import MixerSizes

LAYER_LETTERS = {"M": "Mamba-3", "*": "attention", "-": "MLP"}


@dataclass(frozen=True)
class ModelSection:
    """Sizes of the hybrid model."""

    hybrid_override_pattern: str = "M*M-"  # one letter per layer: M Mamba-3, * attention, - MLP
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 4
    mamba_state_dim: int = 16
    mamba_head_dim: int = 16
    mamba_num_groups: int = 1
    mamba_num_heads: int | None = None  # default: mamba3_expand * hidden_size / mamba_head_dim
    init_method_std: float = 0.02
    params_dtype: str = "fp32"  # fp32 or bf16

    def __post_init__(self) -> None:
        unknown = sorted(set(self.hybrid_override_pattern) - set(LAYER_LETTERS))
        if unknown or not self.hybrid_override_pattern:
            allowed = ", ".join(f"{letter} ({what})" for letter, what in LAYER_LETTERS.items())
            raise ConfigError(
                f"model.hybrid_override_pattern {self.hybrid_override_pattern!r}: must be letters out of {allowed}"
            )
        _at_least(self, "model", 1, "hidden_size", "ffn_hidden_size", "num_attention_heads")
        _one_of(self, "model", "params_dtype", ("fp32", "bf16"))
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"model.num_attention_heads {self.num_attention_heads}: must divide hidden_size, {self.hidden_size}"
            )


@dataclass(frozen=True)
class DataSection:
    """Byte-level tokens of the Python standard library's own sources."""

    sequence_length: int = 64
    max_bytes: int | None = None  # default: all of the text

    def __post_init__(self) -> None:
        _at_least(self, "data", 8, "sequence_length")
        if self.max_bytes is not None:
            _at_least(self, "data", 10_000, "max_bytes")


@dataclass(frozen=True)
class OptimizerSection:
    """Adam and its schedule."""

    lr: float = 1e-3
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_style: str = "cosine"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        _one_of(self, "optimizer", "lr_decay_style", ("constant", "linear", "cosine"))
        _at_least(self, "optimizer", 0, "min_lr", "lr_warmup_steps", "weight_decay", "clip_grad")
        if self.lr <= 0 or self.min_lr > self.lr:
            raise ConfigError(f"optimizer.lr {self.lr}: must be above 0 and at least min_lr, {self.min_lr}")


@dataclass(frozen=True)
class TrainingSection:
    """How long, how much at a time, and from which seed."""

    steps: int = 50
    micro_batch_size: int = 2
    num_microbatches: int = 1
    seed: int = 1234
    tensor_parallel: int = 1  # ranks that share each layer; torchrun starts a multiple of it
    threads: int = 1  # of torch on a CPU: another number rounds differently

    def __post_init__(self) -> None:
        _at_least(self, "training", 1, "steps", "micro_batch_size", "num_microbatches", "tensor_parallel", "threads")


@dataclass(frozen=True)
class CompareSection:
    """When two curves count as different."""

    floor_chunk_size: int = 8  # chunk of the noise-floor run: same maths, other rounding
    max_floor_ratio: float = 3.0
    max_mean_loss_difference: float | None = None  # relative; default: 1e-5 in fp32, 2e-3 in bf16

    def __post_init__(self) -> None:
        _at_least(self, "compare", 8, "floor_chunk_size")
        _at_least(self, "compare", 1, "max_floor_ratio")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `mamba3` are the plugin's own settings, the kernels among them."""

    model: ModelSection = field(default_factory=ModelSection)
    mamba3: Mamba3Config = field(default_factory=Mamba3Config)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    compare: CompareSection = field(default_factory=CompareSection)

    def __post_init__(self) -> None:
        if not self.mamba3.use_mamba3_mixer:
            raise ConfigError("mamba3.use_mamba3_mixer: must be true, or the 'M' layers would not be Mamba-3")
        if self.optimizer.lr_warmup_steps >= self.training.steps:
            raise ConfigError(
                f"optimizer.lr_warmup_steps {self.optimizer.lr_warmup_steps}: must be below training.steps, "
                f"{self.training.steps}"
            )
        MixerSizes.from_config(self.model, self.model.hidden_size, self.mamba3)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a run from a YAML file, then apply overrides such as "training.steps=3".

        Raises:
            ConfigError: no such file, not a mapping of sections, an unknown section or key, a value not allowed.
        """
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"--config {path}: no such file")
        try:
            content = _load(path.read_text()) or {}
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"--config {path}: must be a mapping of sections, not {type(content).__name__}")
        for override in overrides:
            _override(content, override)
        return cls.from_mapping(content)

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> RunConfig:
        """Build a run from nested mappings. Raises ConfigError as `from_yaml` does."""
        sections = {f.name: f.default_factory for f in fields(cls)}
        if unknown := sorted(set(content) - set(sections)):
            raise ConfigError(f"unknown section {unknown[0]!r}: allowed are {', '.join(sections)}")
        built = {}
        for name, keys in content.items():
            if not isinstance(keys, Mapping):
                raise ConfigError(f"section {name}: must be a mapping of keys, not {type(keys).__name__}")
            if name == "mamba3":
                built[name] = Mamba3Config.from_mapping(keys)
            else:
                built[name] = _section(sections[name], name, keys)
        return cls(**built)

    def to_mapping(self) -> dict[str, Any]:
        """Nested mappings with every key, from which `from_mapping` builds an equal run."""
        return asdict(self)

    def with_mamba3(self, **settings: Any) -> RunConfig:
        """The same run with some of the plugin's settings changed."""
        return replace(self, mamba3=replace(self.mamba3, **settings))

    def digest(self) -> str:
        """Hash of everything that changes what a run computes; what only judges it is left out."""
        content = {name: keys for name, keys in self.to_mapping().items() if name != "compare"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where 1e-3 is a string; here it is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _load(text: str) -> Any:
    return yaml.load(text, _Loader)


def _section(cls: type, name: str, keys: Mapping[str, Any]) -> Any:
    types = get_type_hints(cls)
    for key, value in keys.items():
        if key not in types:
            raise ConfigError(f"unknown key '{name}.{key}': allowed are {', '.join(types)}")
        allowed = get_args(types[key]) if isinstance(types[key], UnionType) else (types[key],)
        accepted = (*allowed, int) if float in allowed else allowed
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise ConfigError(f"{name}.{key} {value!r}: must be of type {wanted}, not {type(value).__name__}")
    return cls(**keys)


def _override(content: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    section, dot, key = path.partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override}: must be SECTION.KEY=VALUE, for example training.steps=20")
    keys = content.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigError(f"section {section}: must be a mapping of keys, not {type(keys).__name__}")
    keys[key] = _load(value)


def _at_least(section: Any, name: str, smallest: int, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) < smallest:
            raise ConfigError(f"{name}.{key} {getattr(section, key)}: must be at least {smallest}")


def _one_of(section: Any, name: str, key: str, allowed: Sequence[str]) -> None:
    if getattr(section, key) not in allowed:
        raise ConfigError(f"{name}.{key} {getattr(section, key)!r}: must be one of {', '.join(allowed)}")

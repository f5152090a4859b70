"""`python -m mindspeed_mamba3_plugin doctor`: what is installed here, what can run, what would be patched; and
`... launch SCRIPT [flags]`: somebody's Megatron or MindSpeed training script with the plugin in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from . import launch
from .config import ConfigError, Mamba3Config
from .ops import registry
from .version import __version__

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "triton-ascend",
    "torch_npu",
    "megatron-core",
    "mindspeed",
    "mamba_ssm",
    "tilelang",
)

_CANN_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (0 usable, 1 a problem, 2 wrong usage by way of SystemExit)."""
    parser = argparse.ArgumentParser(prog="mindspeed-mamba3", description="Mamba-3 MIMO for Megatron and MindSpeed")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="what is installed here, what can run, what would be patched")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = commands.add_parser("launch", help="run a training script with the plugin in it", allow_abbrev=False)
    command.add_argument(
        "--config", metavar="FILE.yaml", help="settings: a section mamba3, and one megatron of flags"
    )
    command.add_argument("script", metavar="SCRIPT", help="pretrain_mamba.py, pretrain_hybrid.py or one like them")
    command.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script, --mamba3-* among them")
    args = parser.parse_args(argv)
    if args.command == "launch":
        try:
            launch.run(args.script, args.flags, args.config)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    found = examine()
    print(json.dumps(found, indent=2) if args.json else _screen(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Versions, device, kernels and patches of this environment, and its problems (one sentence each)."""
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    if versions["mindspeed"] is None and find_spec("mindspeed"):
        versions["mindspeed"] = "a source tree"
    device, problems = _device()
    kernels = examine_kernels(device)
    patches = _patches()
    problems += package_problems(versions, device) + stack_problems(device)
    problems += [f"patch {p['target']} is refused: {p['why']}" for p in patches if p["state"] == "refused"]
    return {
        "plugin": __version__,
        "python": sys.version.split()[0],
        "versions": versions,
        "device": device,
        "kernels": kernels,
        "patches": patches,
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    if distribution == "megatron-core":  # often a source tree on the path, beside an installed one
        from .patches.symbols import installed_version

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return installed_version(distribution)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _device() -> tuple[str, list[str]]:
    try:
        from .platforms import detect

        return detect(), []
    except Exception as error:  # whatever a broken accelerator stack raises is what the reader came to see
        return "unknown", [f"the device cannot be found: {error!r}"]


def examine_kernels(device: str) -> dict[str, dict[str, str | None]]:
    """For each kernel name, the implementation it means on this device, or why it cannot run."""
    rows: dict[str, dict[str, str | None]] = {}
    for name in registry.KERNEL_NAMES:
        try:
            rows[name] = {"runs": registry.resolve(name, device), "why_not": None}
        except ValueError as error:
            rows[name] = {"runs": None, "why_not": str(error)}
    return rows


def _patches() -> list[dict[str, Any]]:
    from . import patches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of each optional package it does without
        return [asdict(status) for status in patches.report(Mamba3Config(use_mamba3_mixer=True))]


def package_problems(versions: dict[str, str | None], device: str) -> list[str]:
    problems = []
    if versions["torch"] is None:
        problems.append("torch is not installed")
    if versions["triton"] and versions["triton-ascend"]:
        problems.append(
            f"triton {versions['triton']} and triton-ascend {versions['triton-ascend']} are both installed and "
            "overwrite each other: uninstall both, then install the one that this device needs"
        )
    if device == "npu" and versions["triton-ascend"] is None:
        problems.append("the device is an NPU and triton-ascend is not installed")
    return problems


def stack_problems(device: str) -> list[str]:
    """What is wrong with the accelerator's software, or with the order in which things were imported."""
    problems = []
    if device == "cpu" and find_spec("torch_npu") and not any(map(os.environ.get, _CANN_VARIABLES)):
        problems.append(
            "torch_npu is installed, and neither of ASCEND_TOOLKIT_HOME and ASCEND_HOME_PATH is set: install CANN "
            "and source its set_env.sh"
        )
    from .patches import mindspeed

    if mindspeed.adaptor_has_run() and not mindspeed.registered():
        problems.append(
            "mindspeed.megatron_adaptor was imported before this plugin: call patches.mindspeed.register() or import "
            "mindspeed_mamba3_plugin.auto before it"
        )
    if find_spec("megatron_adaptor"):
        problems.append(
            "MegatronAdaptor (MindSpeed core_r0.17.0 and later) is installed, with which this plugin was never "
            "tried: use MindSpeed core_r0.16.0 or older"
        )
    return problems


def _screen(found: dict[str, Any]) -> str:
    lines = [f"mindspeed_mamba3_plugin {found['plugin']}, Python {found['python']}, device {found['device']}", ""]
    lines += [f"  {name:<15}{version or 'not installed'}" for name, version in found["versions"].items()]
    lines += ["", "kernels"]
    lines += [f"  {name:<15}{row['runs'] or 'no: ' + row['why_not']}" for name, row in found["kernels"].items()]
    lines += ["", "patches, with --use-mamba3-mixer"]
    for p in found["patches"]:
        lines.append(f"  {p['state']:<12} {p['target']}")
        lines += [f"  {'':<12} {p['why']}"] if p["why"] else []
    lines += ["", *(f"PROBLEM: {p}" for p in found["problems"])] if found["problems"] else ["", "usable"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Relative L2 error of every gradient at the 11 official shapes, in bf16, against fp64: ours and TileLang's.

    python tests/ops/precision_table.py [--live] [--json FILE]   on GPUs: measure, print the tables, save the numbers
    python tests/ops/precision_table.py --from FILE --write DOC  anywhere: put the tables of saved numbers into DOC

TileLang's kernels are measured beside ours when mamba_ssm and tilelang can be imported (--live insists on it;
compiling takes minutes); otherwise the numbers of tilelang_accuracy.json stand in for them: state-spaces/mamba
e9594ce, tilelang 0.1.8, an H200, its function `mamba_mimo_bwd_combined`. It is given exact accumulated angles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from cases import make, relative_error

from mindspeed_mamba3_plugin.ops import reference, registry, tilelang
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, TENSOR_ARGS, Gradients, Inputs

SHAPES = [  # N, P, R, chunk size
    (16, 64, 4, 8), (32, 64, 4, 16), (64, 64, 4, 16), (128, 64, 4, 16), (256, 64, 4, 8), (64, 128, 4, 16),
    (128, 32, 4, 16), (128, 128, 4, 8), (128, 64, 8, 8), (128, 64, 2, 32), (128, 64, 1, 64),
]  # fmt: skip
# The shapes that upstream tests with the fused norm come on top.
CASES = {"N{}_P{}_R{}_C{}".format(*s): (s, False) for s in SHAPES}
CASES |= {"N{}_P{}_R{}_C{}_norm".format(*s): (s, True) for s in (SHAPES[1], SHAPES[3])}
FAMILIES = {"triton-ascend": "plain family", "triton-gpu": "GPU family"}
RECORDED = Path(__file__).with_name("tilelang_accuracy.json")
UPSTREAM_NAMES = {"dadt": "dA", "dmimo_out": "dmimo_o", "dd": "dD", "dnorm_weight": "dout_norm_weight"}
BEGIN, END = "<!-- precision table: begin -->", "<!-- precision table: end -->"


def measure(
    device: str, cases: dict, B: int, S: int, H: int, jobs: int, save: Callable[[dict], None] = lambda errors: None
) -> dict:
    """{case: {implementation: {gradient: error}}}; implementations are the families and TileLang.

    Each has a process of its own, since compiling takes most of the time and TileLang's first kernel of a process may
    be wrong; they are dealt out over the GPUs, ours first. `save` gets what there is so far, after every process."""
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device == "cuda" else [device]
    names = [name for name in (*FAMILIES, "tilelang") if not registry.missing(name)]
    work = [(name, case, *cases[case]) for name in names for case in cases]
    tasks = [(B, S, H, place, *what) for place, what in zip(itertools.cycle(devices), work)]
    errors: dict[str, dict] = {case: {} for case in cases}
    with get_context("spawn").Pool(min(jobs, len(tasks)), maxtasksperchild=1) as pool:
        for name, case, found in pool.imap_unordered(measure_one, tasks):
            if found:
                errors[case][name] = found
                save(errors)
    return errors


def measure_one(task: tuple) -> tuple[str, str, dict | None]:
    """One implementation at one case; None where TileLang's compiler fails, which it says."""
    B, S, H, device, name, case, (N, P, R, C), norm = task
    if device != "cpu":
        torch.cuda.set_device(device)
    x = make(
        B, S, H, R=R, N=N, P=P, chunk_size=C, norm=norm, dtype=torch.bfloat16, device=device, seed=N + P + R
    )  # fmt: skip
    grad_out = torch.randn(x.V.shape, generator=torch.Generator().manual_seed(1)).to(device, x.dtype)
    true = reference.backward(doubled(x), grad_out.double())
    if name != "tilelang":
        return name, case, errors(registry.load(name).backward(x, grad_out), true)
    try:
        return name, case, errors(upstream_gradients(x, grad_out), true)
    except Exception as error:  # of a compiler that is not ours: the other cases are worth having
        print(f"TileLang at {case}: {error!r}", file=sys.stderr)
        return name, case, None


def doubled(x: Inputs) -> Inputs:
    given = {n: t.double() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    return replace(x, **given, dtype=torch.float64)


def errors(grads: Gradients, true: Gradients) -> dict[str, float]:
    named = zip(GRADIENT_NAMES, grads, true, strict=True)
    return {n: relative_error(ours, t) for n, ours, t in named if t is not None}


def upstream_gradients(x: Inputs, grad_out: torch.Tensor) -> Gradients:
    """The same gradients by upstream's kernels."""
    from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd import mamba_mimo_bwd_combined
    from mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils import compute_dacs_segsum_triton

    angles, dt = x.Angles.double().requires_grad_(), x.DT.double().requires_grad_()
    theta = torch.cumsum(torch.tanh(angles) * dt.transpose(1, 2)[..., None] * torch.pi, dim=1)
    dA_cs, dA_cs_rev, segsum = compute_dacs_segsum_triton(x.ADT.contiguous(), x.chunk_size)
    found = mamba_mimo_bwd_combined(
        grad_out, x.Q, x.K, x.V, x.Q_bias, x.K_bias, x.MIMO_V, x.MIMO_Out, x.Z, x.MIMO_Z, theta.detach().float(),
        dA_cs, dA_cs_rev, x.DT, x.Trap, x.D, segsum, x.chunk_size, x.rotary_dim_divisor, x.dtype,
        bb_threads=tilelang.THREADS.get(x.Q.shape[-1], 256), fuse_pregate_headwise_rms_norm=x.fuse_norm,
        outproj_norm_weight=x.outproj_norm_weight, outproj_norm_eps=x.norm_eps,
    )  # fmt: skip
    grads = Gradients(*found)
    theta.backward(grads.dangles.double())
    return grads._replace(dangles=angles.grad, ddt=grads.ddt + dt.grad)


def table(errors: dict, implementation: str) -> str:
    """Markdown: gradients by shapes; a cell is our error, and TileLang's where it is known, in percent."""
    recorded = json.loads(RECORDED.read_text())
    shapes = [s for s, found in errors.items() if implementation in found]
    names = [n for n in GRADIENT_NAMES if any(n in errors[s][implementation] for s in shapes)]
    head = "| gradient | " + " | ".join(s.replace("_", " ") for s in shapes) + " |"
    lines = [head, "|---" * (len(shapes) + 1) + "|"]
    for name in names:
        cells = []
        for shape in shapes:
            if name not in errors[shape][implementation]:
                cells.append("")
                continue
            theirs = tilelang_error(errors, recorded, shape, name)
            ours = f"{100 * errors[shape][implementation][name]:.2f}"
            cells.append(ours if theirs is None else f"{ours} / {100 * theirs:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tilelang_error(errors: dict, recorded: dict, shape: str, name: str) -> float | None:
    if "tilelang" in errors[shape]:
        return errors[shape]["tilelang"].get(name)
    return recorded.get(shape, {}).get(UPSTREAM_NAMES.get(name, name), {}).get("rel_l2")


def worse(errors: dict) -> list[str]:
    """Where one of ours has a larger error than TileLang."""
    recorded, found = json.loads(RECORDED.read_text()), []
    for shape, by in errors.items():
        for implementation in FAMILIES.keys() & by.keys():
            for name, ours in by[implementation].items():
                theirs = tilelang_error(errors, recorded, shape, name)
                if not ours < 1 or (theirs is not None and ours > theirs):
                    found.append(f"{implementation} {shape} {name}: {ours:.2e}, TileLang {theirs}")
    return sorted(found)


def section(saved: dict) -> str:
    """The part of the document between the marks."""
    errors = saved["errors"]
    live = sum("tilelang" in by for by in errors.values())
    source = f"measured beside ours at {live} of the {len(errors)} cases, recorded earlier at others"
    parts = [
        f"Relative L2 error in percent of each gradient, bf16, {saved['where']}, against the fp64 reference on the "
        f"same inputs: ours / TileLang's ({source}). A perfect result rounded to bf16 has 0.17."
    ]
    for name, title in FAMILIES.items():
        if any(name in by for by in errors.values()):
            parts += [f"### {title[0].upper()}{title[1:]}", table(errors, name)]
    bad = worse(errors)
    parts.append("Ours is nowhere worse." if not bad else "Ours is worse here: " + "; ".join(bad) + ".")
    return "\n\n".join(parts)


def write(document: Path, text: str) -> None:
    """Replace the part between the marks, or append it with its heading."""
    old = document.read_text() if document.exists() else "# The operator and its kernels\n"
    if BEGIN in old:
        before, rest = old.split(BEGIN)
        after = rest.split(END)[1]
    else:
        before, after = old.rstrip() + "\n\n## Precision\n\n", "\n"
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--live", action="store_true", help="fail where TileLang's kernels cannot be imported")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the numbers")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="numbers saved before; no GPU needed")
    parser.add_argument("--write", type=Path, metavar="DOC", help="put the tables into this Markdown file")
    parser.add_argument("--cpu", action="store_true", help="two tiny shapes in Triton's interpreter, to try this out")
    args = parser.parse_args()
    if args.live and (why := registry.missing("tilelang")):
        parser.error(f"--live: {why}")
    if args.saved:
        saved = json.loads(args.saved.read_text())
    elif args.cpu:
        small = {name: CASES[name] for name in ("N16_P64_R4_C8", "N32_P64_R4_C16_norm")}
        saved = {
            "where": "interpreter, B 1 S 40 H 2",
            "errors": measure("cpu", small, 1, 40, 2, 1),
        }
    elif torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()}, B 1 S 512 H 16 G 1"

        def save(errors: dict) -> None:
            if args.json:
                args.json.write_text(json.dumps({"where": where, "errors": errors}, indent=1))

        saved = {"where": where, "errors": measure("cuda", CASES, 1, 512, 16, os.cpu_count(), save)}
    else:
        parser.error("needs a GPU, or --from FILE, or --cpu")
    text = section(saved)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(saved, indent=1))
    if args.write:
        write(args.write, text)
    return 1 if worse(saved["errors"]) else 0


if __name__ == "__main__":
    sys.exit(main())

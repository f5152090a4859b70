"""Compile every kernel at sizes that are no official shape; prints the faults by size, or the refusal, as JSON."""

import json
import sys
import tempfile

from mindspeed_mamba3_plugin.offline import cases, compile_check
from mindspeed_mamba3_plugin.offline.launches import ASCEND_910B3

tempfile.tempdir = tempfile.mkdtemp()
found = {}
for size in sys.argv[1:]:
    N, P, R, dtype = size.split(",")
    case = cases.Case(cases.Shape(size, int(N), int(P), int(R), 16), dtype, "plain")
    rows = compile_check.check(case, ["1.2.0"], ASCEND_910B3, {})
    found[size] = [f"{row.kernel}: {row.faults}" for row in rows if row.faults]
print(json.dumps(found))

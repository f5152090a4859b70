"""One of two tensor-parallel ranks, of which the second alone has a wrong gradient: prints what each diagnoses."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from mindspeed_mamba3_plugin.training.config import RunConfig
from mindspeed_mamba3_plugin.training.diagnose import diagnose

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    plant = {"dv": 1.01} if os.environ["RANK"] == "1" else {}
    print(json.dumps(diagnose(RunConfig.from_yaml(sys.argv[1]), Path(sys.argv[2]), plant)), flush=True)

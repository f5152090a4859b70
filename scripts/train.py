#!/usr/bin/env python3
"""One training run from a YAML file (see --help)."""

import sys

from mindspeed_mamba3_plugin.training.trainer import main

if __name__ == "__main__":
    sys.exit(main())

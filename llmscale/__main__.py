"""`python -m llmscale` is the `llmscale` command."""

from __future__ import annotations

import sys

from llmscale.cli.main import main

sys.exit(main())

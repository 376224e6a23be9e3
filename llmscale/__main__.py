"""`python -m llmscale` is the `llmscale` command."""

from __future__ import annotations

import os.path
import sys

if not getattr(sys.flags, "safe_path", False):
    # `-m` has put the working folder first, where any file could take the place of a library.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from llmscale.cli.main import main

sys.exit(main())

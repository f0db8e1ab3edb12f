"""Real processes, laid out as the packages are. What tests share is in harness/ (processes and
clusters), references/ (models, and the one process that they must equal) and contracts/."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""

"""Turn the newest result into docs/strategies.md."""
from pathlib import Path
FOLDER = Path(__file__).resolve().parent / "results" / "strategies"

"""Rules about what stands around the code: README, CHANGELOG, and no trace of one machine in any file."""

import re
from pathlib import Path

from tests.house.tree import text_files

MOST_LINES_OF_README = 120
FIRST_SCREEN = 30
# A folder that only one machine has, and where packages come from, which is for pip to know.
ONE_MACHINE = re.compile(r"(?:^|[^\w.])/(?:work|farm|root|home/\w+|Users/\w+)/", re.MULTILINE)
INDEX_HOST = re.compile(
    r"download\.pytorch\.org|files\.pythonhosted\.org|--(?:extra-)?index-url|--find-links"
)

CHANGELOG_HEADINGS = re.compile(
    r"# Changelog"
    r"|## \[Unreleased\]"
    r"|## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}"
    r"|### (?:Added|Changed|Deprecated|Removed|Fixed|Security)"
)


def readme_is_one_read(root: Path) -> list[str]:
    """README has at most 120 lines, something to run in its first screen, and names both commands."""
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    found = []
    if len(lines) > MOST_LINES_OF_README:
        found.append(f"README.md: {len(lines)} lines, at most {MOST_LINES_OF_README}")
    first_screen = "\n".join(lines[:FIRST_SCREEN])
    if not re.search(r"^```(?:python|bash|console)\n(?:.*\n)*?```", first_screen + "\n", re.MULTILINE):
        found.append(f"README.md: nothing to run within its first {FIRST_SCREEN} lines")
    found += [
        f"README.md: does not name `{c}`" for c in ("make demo", "make test") if c not in "\n".join(lines)
    ]
    return found


def changelog_keeps_its_form(root: Path) -> list[str]:
    """CHANGELOG has the headings of Keep a Changelog and no others, unreleased changes first."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    found = [f"CHANGELOG.md: {h!r} has another form" for h in headings if not CHANGELOG_HEADINGS.fullmatch(h)]
    if headings[:2] != ["# Changelog", "## [Unreleased]"]:
        found.append("CHANGELOG.md: does not begin with '# Changelog' and '## [Unreleased]'")
    return found


def files_name_no_machine(root: Path) -> list[str]:
    """No file names a folder of one machine, or a host that packages come from."""
    found = []
    for path, text in text_files(root):
        for pattern, what in (
            (ONE_MACHINE, "a folder of one machine"),
            (INDEX_HOST, "where packages come from"),
        ):
            match = pattern.search(text)
            if match and path != "tests/house/papers.py":
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path}:{line}: names {what}: {match[0].strip()}")
    return found

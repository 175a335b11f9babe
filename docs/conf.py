"""The site: `make site` builds it from these pages and from the docstrings of varlen's public names."""

import re
from typing import Any

from sphinx_markdown_builder.translator import PREDEFINED_ELEMENTS

from varlen import __version__

PREDEFINED_ELEMENTS["abbreviation"] = None  # the `*` of a signature, which the Markdown would miss

project, author, release = "varlen", "The varlen authors", __version__
copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_llm.txt",
]
exclude_patterns = ["_build"]

html_theme, html_title = "furo", f"varlen {release}"
html_static_path, html_css_files = ["static"], ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for files

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # tables that programs write begin at the third level
smartquotes = False  # names of methods stand in quotation marks

default_role = "code"  # docstrings name things in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {name: name.rpartition(".")[2] for name in ("npt.ArrayLike", "ArrayLike", "IntArray")}
maximum_signature_line_length = 90

# Beside each page stands its Markdown, and the index as `llms.txt`.
llms_txt_override_source = "index"
llms_txt_nested_enabled = False
llms_txt_suffix_mode = "append"
llms_txt_build_parallel = False  # the pages are read once


def _plain_aliases(*event: Any) -> tuple[str | None, str | None]:
    """Return a signature and what it returns with aliases by their names, also beside others (`ArrayLike | None`)."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in event[-2:])


def setup(app: Any) -> None:
    """Connect what changes signatures."""
    app.connect("autodoc-process-signature", _plain_aliases)

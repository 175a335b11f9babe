"""The site: `make site` builds it from these pages and from the docstrings of varlen's public names."""

from varlen import __version__

project, author, release = "varlen", "varlen's authors", __version__
copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_llm.txt",
]
html_theme, html_title = "furo", "varlen"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "code"  # docstrings name things in single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Tables that programs write begin at the third level.
suppress_warnings = ["myst.header"]

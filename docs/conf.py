"""The site: `make site` builds it from these pages and from the docstrings of varlen's public names."""

from varlen import __version__

project, author, copyright, release = "varlen", "varlen's authors", "varlen's authors", __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "varlen"
myst_heading_anchors = 3
exclude_patterns = ["_build"]
master_doc = "index"
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
suppress_warnings = []

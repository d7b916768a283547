"""Sphinx configuration; `make docs` builds with warnings as errors."""

from sb3_td3x.version import __version__

project = "sb3_td3x"
author = "The sb3_td3x developers"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_parser"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "sphinx_rtd_theme"
html_title = f"sb3_td3x {__version__}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build"]

"""Sphinx configuration; `make docs` builds with warnings as errors."""

from sb3_td3x.version import __version__

project = "sb3_td3x"
author = "The sb3_td3x developers"
version = release = __version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # formulas are drawn without a server
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
# Names that the API reference links to; kept here as plain text, so that a build needs no network
intersphinx_mapping = {
    name: (address, f"inventories/{name}.inv")
    for name, address in {
        "python": "https://docs.python.org/3",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
        "gymnasium": "https://gymnasium.farama.org",
        "stable_baselines3": "https://stable-baselines3.readthedocs.io/en/master",
    }.items()
}
html_theme = "furo"
html_title = "sb3_td3x"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]

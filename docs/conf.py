"""Sphinx configuration; `make docs` builds with warnings as errors."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

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
html_math_renderer = "mathml"
html_show_copyright = False
html_title = f"sb3_td3x {__version__}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build"]


def _write(translator, node):
    try:
        translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        logging.getLogger(__name__).warning(f"{error}", location=node)
    raise nodes.SkipNode


def setup(app):
    """Formulas as MathML, which browsers draw themselves: MathJax would be fetched from a server at each reading."""
    app.add_html_math_renderer("mathml", (_write, None), (_write, None))

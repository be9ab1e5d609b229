"""Settings of Sphinx. `make docs` builds the site in docs/_build/html; nothing is downloaded while it is built."""

from forgefield import __version__

project = "Forgefield"
author = "The Forgefield developers"
copyright = "The Forgefield developers, MIT licence"
version = release = __version__

extensions = [
    "myst_nb",  # Markdown pages and executed notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "notebooks"]
default_role = "literal"  # `name` in docstrings is code, as in Markdown

# Tutorials are stored with their output (`make tutorials` executes them).
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # links as on GitHub: page.md#title-of-a-section

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_rtype = False

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "Forgefield"
html_static_path = ["_static"]
html_css_files = ["forgefield.css"]
html_show_sourcelink = False
html_copy_source = True  # notebooks can be downloaded from there
html_sourcelink_suffix = ""
templates_path = ["_templates"]
html_theme_options = {
    "logo": {"text": "Forgefield"},
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_prev_next": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "article_header_end": ["download-notebook"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "**": ["sidebar-nav-bs"]}

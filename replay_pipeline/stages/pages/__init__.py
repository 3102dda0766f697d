"""Web pages that show sessions, pairs, and results, and the marks that people gave.

Session text is untrusted. A page gets it only as data, and its content security policy allows only
the page's own scripts.
"""

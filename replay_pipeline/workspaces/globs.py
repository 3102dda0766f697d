"""Globs as ripgrep and git read them."""

import re


def expression_of(pattern: str) -> str:
    """Return a glob as a regular expression on relative paths; without `/` it matches at any depth."""
    pattern = pattern.removeprefix("./")
    out = "" if "/" in pattern else "(?:.*/)?"
    at = depth = 0
    pattern = pattern.removeprefix("/")
    while at < len(pattern):
        sign = pattern[at]
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
            continue
        if pattern.startswith("**", at):
            out, at = out + ".*", at + 2
            continue
        if sign == "[" and (end := pattern.find("]", at + 2)) > 0:
            out += "[" + pattern[at + 1 : end].replace("!", "^", 1).replace("\\", "\\\\") + "]"
            at = end
        elif sign == "{":
            out, depth = out + "(?:", depth + 1
        elif sign == "}" and depth:
            out, depth = out + ")", depth - 1
        elif sign == "," and depth:
            out += "|"
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(sign, re.escape(sign))
        at += 1
    return out + ")" * depth

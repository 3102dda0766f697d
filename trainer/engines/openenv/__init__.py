"""OpenEnv: recorded states as an environment server, and any OpenEnv server as TRL's environment.

`client` and `server` import the package; `adapter`, `episodes`, `failures` and `tool_methods` do
not.
"""

"""OpenEnv: serve recorded states as an environment, and use any OpenEnv server as TRL's environment.

`client` and `server` import the package `openenv`. `adapter`, `episodes`, `failures`, and
`tool_methods` don't.
"""

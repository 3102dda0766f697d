"""OpenEnv: use any OpenEnv server as TRL's environment. Only `client` imports the package `openenv`."""

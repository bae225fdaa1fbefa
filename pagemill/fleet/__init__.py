"""The processes of a server: API servers, engine cores and headless nodes, started, watched and restarted."""

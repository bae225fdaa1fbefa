"""Paths and the handlers behind them, one file per endpoint family. Nothing else lives here."""

"""What strangers may try on the HTTP port, each as a test against a real server."""

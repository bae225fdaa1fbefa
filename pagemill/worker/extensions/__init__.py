"""The workers' halves of step extensions."""

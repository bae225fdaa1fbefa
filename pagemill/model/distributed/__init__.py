"""Groups of ranks that compute one model together, and what each rank holds of it. Knows no layer and no step."""

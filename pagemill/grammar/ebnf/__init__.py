"""Forms of outputs as EBNF grammars, exactly, for backends that read nothing richer. Knows no library."""

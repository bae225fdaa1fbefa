"""A model as a list of operations, and what is made of the list: a program for torch and Triton, a plan for C++."""

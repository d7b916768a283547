"""
Studies: many runs from one file, on this machine or on a Ray cluster.

``grid`` reads the file, ``folder`` holds what is written, ``attempt`` begins one run or goes on with it, ``runners`` decide
where the runs are made, ``driver`` hands them out, ``watch`` reads how far they are.
"""

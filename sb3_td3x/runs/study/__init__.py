"""
Studies: many runs from one file, on this machine or on a Ray cluster.

``grid`` reads the file, ``attempt`` makes or resumes one run and knows the study's folder, ``runners`` decide where runs are
made.
"""

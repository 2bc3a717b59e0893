"""Evolving subnetwork training (EST): which part of the model a step trains, and how it is cut out."""

"""Everything `pin-jobs dev` needs on one machine: embedded servers, stand-in host tables, call traffic, a supervisor.

Imported by the command line alone and by the tests, installed by the extra `sandbox`; production never loads it.
"""

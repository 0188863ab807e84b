"""The documentation: generates its pages and parts, and finds what is dead, wrong or unknown in it."""

"""What is generated in the documentation: a module for each page or part."""

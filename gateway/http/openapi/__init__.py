"""The description of the rollout URL's routes, made from the router: for programs as OpenAPI, for people as a page."""

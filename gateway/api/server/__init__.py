"""HTTP server: protocol, middleware, router, authentication, and bodies in and out."""

"""What operators add to router.yaml while the gateway runs."""

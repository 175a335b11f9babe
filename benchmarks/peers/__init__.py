"""One small adapter a peer: it calls the installed package at its best settings and changes nothing in it."""

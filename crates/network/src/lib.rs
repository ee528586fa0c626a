//! Guest network cards: frame ports, the output buffer, tap devices and bridges

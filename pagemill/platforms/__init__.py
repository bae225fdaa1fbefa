"""What differs between devices, behind one interface; null objects where a device lacks a notion."""

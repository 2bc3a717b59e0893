"""Models on megatron-core modules: back-end providers, presets, construction, initialisation."""

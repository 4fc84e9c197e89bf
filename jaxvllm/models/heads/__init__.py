"""Draft heads: small networks beside a model that guess what it will say."""

"""The formulas behind the sections, for the page; docs/statistics.md has them all, with units."""

_NAMES = "gᵢ: gradient of sample i's own loss. G = (1/N) Σᵢ gᵢ over the N finite samples."

FORMULAS: dict[str, tuple[str, ...]] = {
    "norm": ("std = √(Σ(x − mean)² / (N − 1))", "percentiles: linear between the two nearest"),
    "clipping": ("clipped: the share of samples with ‖gᵢ‖ > c",),
    "batch": (
        "trΣ = (mean‖gᵢ‖² − ‖G‖²) · N/(N − 1)",
        "|G|² = (N‖G‖² − mean‖gᵢ‖²)/(N − 1)",
        "B_simple = trΣ / |G|² (McCandlish et al. 2018); 95%: jackknife, Fieller for the ratio",
        "norm test θ² = (Σ‖gᵢ‖² − N‖G‖²) / (N(N − 1)‖G‖²)",
        "inner-product test θ² = (Σ⟨gᵢ, G⟩² − N‖G‖⁴) / (N(N − 1)‖G‖⁴)",
        "orthogonality test ν² = (Σ‖gᵢ‖² − Σ⟨gᵢ, G⟩²/‖G‖²) / (N(N − 1)‖G‖²)",
        "CABS = learning rate · ξ / L, ξ = mean‖gᵢ‖² − ‖G‖² (Balles et al. 2017)",
        "evidence = 1 − N · meanⱼ Gⱼ² / Varⱼ (Mahsereci et al. 2017)",
    ),
    "directions": (
        "cosine = ⟨gᵢ, G⟩ / (‖gᵢ‖ ‖G‖)",
        "opposed: the share of samples with ⟨gᵢ, G⟩ < 0",
    ),
    "parameters": (
        "share = Σᵢ‖gᵢ,ₚ‖² / Σᵢ‖gᵢ‖²",
        "SNR = ‖Gₚ‖² / (mean‖gᵢ,ₚ‖² − ‖Gₚ‖²)",
        "noise scale: B_simple of the parameter alone",
    ),
    "classes": (
        "noise = (mean‖gᵢ‖² − ‖G_c‖²) · n/(n − 1)",
        "between = Σ_c n_c/N · ‖G_c − G‖²",
        "within = Σ_c n_c/N · (mean‖gᵢ‖² − ‖G_c‖²)",
    ),
    "spectrum": (
        "eigenvalues λₖ of (1/m) Σ gᵢ gᵢᵀ, from the Gram matrix",
        "effective rank = exp(−Σ pₖ ln pₖ), pₖ = λₖ / Σλ (Roy & Vetterli 2007)",
    ),
    "expectations": (
        "Fisher trace = mean‖gᵢ‖²",
        "Jensen gap = ‖E[T(g)] − T(E[g])‖ / ‖T(E[g])‖",
    ),
    "duplicates": ("distance = ‖gᵢ − gⱼ‖ / max(‖gᵢ‖, ‖gⱼ‖)",),
    "nearest": ("cosine = ⟨gᵢ, gⱼ⟩ / (‖gᵢ‖ ‖gⱼ‖)",),
    "samples": ("times median = ‖gᵢ‖ / median‖g‖", "most opposed: the most negative ⟨gᵢ, G⟩"),
    "difference": ("cosine = ⟨G, G′⟩ / (‖G‖ ‖G′‖)",),
    "moved": ("moved = ‖gᵢ′ − gᵢ‖; without rows at least |‖gᵢ′‖ − ‖gᵢ‖|",),
    "history": ("B_simple = trΣ / |G|² (McCandlish et al. 2018)",),
}


def formulas(key: str) -> tuple[str, ...]:
    """Return the lines behind a section, none where it needs none."""
    found = FORMULAS.get(key, ())
    return (*found, _NAMES) if found else ()

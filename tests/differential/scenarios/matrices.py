"""linear_operator by itself: factors, solves, determinants, roots, eigenvalues of dense matrices."""

import torch
from builders import points
from linear_operator import operators as o
from table import See, cases, scenarios


def positive(see: See, *shape: int, n: int = 12, noise: float = 0.1, seed: int = 0) -> torch.Tensor:
    x = points(see, *shape, n, seed=seed)
    square = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    return (square.double().mul(-2).exp() + noise * torch.eye(n, dtype=torch.float64)).float().to(see.dtype)


OPERATORS = {
    "dense": o.DenseLinearOperator,
    "plus diagonal": lambda a: o.AddedDiagLinearOperator(
        o.DenseLinearOperator(a), o.DiagLinearOperator(a.diagonal(dim1=-2, dim2=-1) / 2)
    ),
    "plus a constant": lambda a: o.AddedDiagLinearOperator(
        o.DenseLinearOperator(a), o.ConstantDiagLinearOperator(a[..., :1, 0] / 3, a.shape[-1])
    ),
    "root": lambda a: o.RootLinearOperator(a) + 0.0 * o.DenseLinearOperator(a),
    "kronecker": lambda a: o.KroneckerProductLinearOperator(
        o.DenseLinearOperator(a[..., :3, :3]), o.DenseLinearOperator(a)
    ),
    "sum": lambda a: o.DenseLinearOperator(a) + o.DenseLinearOperator(2 * a),
    "scaled": lambda a: o.DenseLinearOperator(a) * 3.0,
    "block": lambda a: o.BlockDiagLinearOperator(o.DenseLinearOperator(torch.stack((a, 2 * a), -3))),
    "triangular": lambda a: o.TriangularLinearOperator(a.tril()),
}


@scenarios(
    cases(of=list(OPERATORS)),
    cases(of=["dense", "plus diagonal", "plus a constant"], batch=["2", "2x3"]),
    cases(of=["dense", "plus diagonal", "sum"], dtype="float32"),
    cases(of=["dense"], n=[1, 2, 130]),
)
def operated(see: See, of: str, batch: str = "", n: int = 12):
    lead = tuple(map(int, batch.split("x"))) if batch else ()
    a = positive(see, *lead, n=n).requires_grad_()
    operator = OPERATORS[of](a)
    right = points(see, *lead, operator.shape[-1], seed=4)
    solved = operator.solve(right)
    see("solved", solved)
    see.grads("solved", solved.sin(), {"a": a})
    if of not in ("triangular", "root"):
        quad, logdet = operator.inv_quad_logdet(right, logdet=True)
        see("quad", quad)
        see("logdet", logdet)
        see("quad of each", OPERATORS[of](a).inv_quad_logdet(right, logdet=True, reduce_inv_quad=False)[0])
        see.grads("quad", quad.sin() + logdet, {"a": a})
        see("root squared", operator.root_decomposition().to_dense())
        see("inverse root squared", operator.root_inv_decomposition().to_dense())
        see("eigenvalues", torch.linalg.eigvalsh(operator.to_dense()))
    see("product", operator @ right)
    see.grads("product", (operator @ right).sin(), {"a": a})


@scenarios(cases(what=["svd", "eigenvectors", "pivoted", "diagonalized", "sqrt", "contour", "cat rows"], kappa=100.0))
def decomposed(see: See, what: str):
    a = positive(see, n=10).requires_grad_(what not in ("svd", "pivoted"))
    operator = o.DenseLinearOperator(a)
    with see.attempt("went"):
        if what == "svd":
            u, s, v = operator.svd()
            see("values", s)
            see("product", u.to_dense() * s.unsqueeze(-2) @ v.to_dense().mT)
        elif what == "eigenvectors":
            values, vectors = operator.eigh()
            see("values", values)
            see("product", vectors.to_dense() * values @ vectors.to_dense().mT)
            see.grads("values", values.sin(), {"a": a})
        elif what == "pivoted":
            see("factor", operator.pivoted_cholesky(4))
        elif what == "diagonalized":
            values, vectors = operator.diagonalization(method="symeig")
            see("product", vectors.to_dense() * values @ vectors.to_dense().mT)
        elif what == "sqrt":
            see("squared", operator.sqrt_inv_matmul(points(see, 10, seed=2)).square())
        elif what == "contour":
            see("samples", operator.zero_mean_mvn_samples(3))
        else:
            cross, new = positive(see, n=12)[:2, :10], positive(see, n=2, seed=3)
            grown = operator.cat_rows(0.1 * cross, new)
            see("grown", grown.to_dense())
            see("root", grown.root_decomposition().to_dense())
            see("inverse", grown.root_inv_decomposition().to_dense())


@scenarios(cases(shape=["9x9", "30x5", "5x30", "200x8", "2x9x4"], dtype=["float64", "float32"], kappa=10.0))
def orthogonal(see: See, shape: str):
    """The pseudo-inverse, by stable QR, whose factors' signs are free."""
    from linear_operator.utils.pinverse import stable_pinverse

    sizes = tuple(map(int, shape.split("x")))
    a = points(see, *sizes[:-1], d=sizes[-1], seed=3) + torch.eye(*sizes[-2:], dtype=see.dtype)
    with see.attempt("pinverse"):
        see("inverse", stable_pinverse(a))


@scenarios(
    cases(change=["matrix", "right side"], what=["solve", "logdet", "product"]),
    stale="who kept what a backward pass needs may give the gradients where stock's says that something was changed",
)
def changed_before_backward(see: See, change: str, what: str):
    a, right = positive(see).requires_grad_(), points(see, 12, seed=2).requires_grad_()
    held, other = a * 1.0, right * 1.0
    operator = o.DenseLinearOperator(held)
    found = {
        "solve": lambda: operator.solve(other),
        "logdet": lambda: sum(operator.inv_quad_logdet(other, logdet=True)),
        "product": lambda: operator @ other,
    }[what]()
    with torch.no_grad():
        if see.first:
            (held if change == "matrix" else other).mul_(1.5)
    with see.attempt("backward"):
        see.grads("found", found.sin(), {"a": a, "right": right})

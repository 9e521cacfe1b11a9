// The least that a compiler must be able to do to make the kernels: what every one of them begins with, a loop of vector
// code, and a library of it.

extern "C" int64_t whorl_probe(int64_t count, const kernel::store* x, kernel::real* y) {
  EACH_ALONE
  for (int64_t i = 0; i < count; ++i) y[i] = kernel::widened(x[i]) * kernel::real(2);
  return count;
}

// Whether a product of numbers in so many parts is made by the processor's matrix unit.
extern "C" bool whorl_unit(int64_t parts, int64_t n, int64_t k, int64_t batch) {
  return kernel::unit_makes(parts, n, k, batch);
}

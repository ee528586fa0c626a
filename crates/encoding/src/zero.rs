/// Whether every byte is zero.
///
/// Checked in blocks, so that the compiler uses vector instructions inside a block and a
/// page with early content is left early.
pub fn is_zero_page(page: &[u8]) -> bool {
    const BLOCK: usize = 256;
    let mut blocks = page.chunks_exact(BLOCK);
    let zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    blocks.all(zero) && zero(page.chunks_exact(BLOCK).remainder())
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::PAGE_SIZE;

    #[test]
    fn any_single_byte_makes_a_page_non_zero() {
        let mut page = [0u8; PAGE_SIZE];
        assert!(is_zero_page(&page));
        for at in 0..PAGE_SIZE {
            page[at] = 1 << (at % 8);
            assert!(!is_zero_page(&page), "byte {at}");
            page[at] = 0;
        }
    }

    #[test]
    fn a_tail_shorter_than_a_block_counts() {
        assert!(is_zero_page(&[]));
        assert!(!is_zero_page(&[0, 0, 1]));
    }
}

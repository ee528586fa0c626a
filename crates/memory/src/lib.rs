//! Guest memory: dirty tracking with userfaultfd and PAGEMAP_SCAN, capture of written pages
